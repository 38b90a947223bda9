"""Curation of data: scores of samples in a table, and the ids of the samples that scores select."""
