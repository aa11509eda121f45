"""What `contributor_average.py` on top is made of: tasks, the training on each rank, and what its losses say."""
