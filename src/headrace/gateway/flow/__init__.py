"""The flow of a request for text. `text_flow` has the order of the stages; each stage is a function of a FlowState."""
