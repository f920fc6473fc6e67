"""Save, locate and load checkpoints."""
