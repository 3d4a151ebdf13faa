"""Moving a factor for each channel from an operation's result into the linears that read it: which operations, and the arithmetic."""
