"""Managed ids: arbitrary ids that get table rows during training and can lose them again."""
