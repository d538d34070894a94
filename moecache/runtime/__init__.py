"""The runtime: a model bigger than its memory, its experts visiting a fixed number of slots.

`offload` opens a model, `plan` says beforehand what fits. Inside, from the outside in: the `engine` holds a model's parts together;
`steps` hears a router and asks the kernel; `source` hands out weights; `residency` makes the kernel's decisions true in the memory of
`slots`, by reads that `transfer` carries out.
"""
