"""The lab: records traffic, replays it, and gates variants on your own prompts before they get traffic."""
