"""The processes of a run: started, followed, and their failures read."""
