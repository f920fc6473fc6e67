"""The configuration and the schema. No torch."""
