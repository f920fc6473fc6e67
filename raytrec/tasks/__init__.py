"""Tasks, their losses, and the objective that combines the losses into one scalar."""
