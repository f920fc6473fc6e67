"""What a model learns: tasks, their losses, and one scalar of all of them."""
