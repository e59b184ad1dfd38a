"""scaletool: train T5 on V100 nodes and measure how its speed grows with the GPU count."""

__version__ = "0.1.0"
