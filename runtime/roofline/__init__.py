"""What a step must read, write and compute, and how long a machine's data sheet says that takes at the least. No tensors, no torch.

`weights` knows the bytes of every linear, `ops` turns a step into operations, `devices` has the data sheets, `job` adds up a job's steps.
`machine` alone imports torch: it finds and measures the machine that this runs on.
"""
