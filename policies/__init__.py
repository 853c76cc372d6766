"""All policies, one file each. Installed as `simlab.policies`; copy any of them to start your own."""
