"""Utilities for all packages, such as errors, storage, text formatting, messages and collectives."""
