"""YAML that comes with a third party's package."""
