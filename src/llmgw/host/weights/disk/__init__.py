"""The cache folder: what of a source is here, proven, and held while it is used."""
