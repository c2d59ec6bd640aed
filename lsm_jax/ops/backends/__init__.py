"""Backends of the ops: how one is described and registered (`registry`), selected (`select`) and run (`run`)."""
