"""Copy the weights of a live model into another model, whatever the layouts are: `sync`.

Scripts enter it by `sync`, and `load` enters it if its source is live. It may import `loading` and
the wings that `loading` may import.
"""
