"""Reinforcement learning: prompts, rewards, and the rollouts that a step trains on."""
