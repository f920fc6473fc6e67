"""Layers and losses shared by several models."""
