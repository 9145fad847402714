"""Ways to train a policy on one or many devices behind one small protocol (`base.py`)."""
