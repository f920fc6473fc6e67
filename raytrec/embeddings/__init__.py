"""Embedding tables: pooling, gradients, optimizers, sharding plans and managed ids."""
