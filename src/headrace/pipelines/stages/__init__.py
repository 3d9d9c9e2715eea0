"""The stages of a pipeline, a module each. pipeline_run has their order, their time and what happens to a late one."""
