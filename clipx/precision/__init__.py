"""Number formats that the towers compute in."""
