"""Tasks, their losses, and the objective that combines all losses into one scalar."""
