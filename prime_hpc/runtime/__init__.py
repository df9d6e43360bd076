"""The process and the machine that it runs on: clocks, event loops, GPUs, the device, memory, the attempt's context.

The ground floor: every room may import this one, and it imports none.
"""
