"""CUDA graphs of a training step: capture, verify against eager execution, replay."""
