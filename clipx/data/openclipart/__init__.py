"""`python -m clipx.data.openclipart`: builds the data set of captioned pictures in two Debian packages."""
