"""`python -m clipx.data.look`: an HTML page about a data set as training reads it."""
