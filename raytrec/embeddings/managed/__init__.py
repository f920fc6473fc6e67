"""Managed ids, which get table rows during training and can lose them again."""
