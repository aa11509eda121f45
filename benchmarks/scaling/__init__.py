"""What `scaling.py` on top is made of: what ranks measure, the constants fitted to it, the model, its check, tables."""
