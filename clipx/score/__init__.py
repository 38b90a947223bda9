"""`python -m clipx.score data=… out=…`: writes a table of scores with a row for each sample."""
