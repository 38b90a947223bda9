"""HTML pages about data sets as training reads them."""
