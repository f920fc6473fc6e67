"""Utilities for all packages: errors, storage, texts, messages and collectives."""
