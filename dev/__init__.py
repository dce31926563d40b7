"""Experiments that plug into the stable recipes through their YAML; see README.md."""
