"""Recipes and components for reasoning RL on torchtune."""
