"""The decisions of the control plane: values in, values out. No module here reads a clock, a file or the API."""
