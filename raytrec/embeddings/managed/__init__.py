"""Managed ids: ids that are assigned to table rows during training and can lose them again."""
