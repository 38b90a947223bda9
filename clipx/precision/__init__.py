"""Number formats of the towers."""
