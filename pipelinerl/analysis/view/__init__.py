"""The command `view`: a local web page over recorded runs, while they go on and afterwards."""
