"""What `micro.py` on top is made of: the parts that need one process, and the ones that need ranks."""
