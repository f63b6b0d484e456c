"""The worker side: what runs in each vLLM worker process, in the order of a step.

extension  the class that vLLM mixes into its worker; the names that stock calls
decoder    where the decoder layers and the final norm are
streams    what a layer's residual stream is, and the proof of it
rows       which rows of a step are which request's tokens, and from which position
store      the captured rows on the host, until the driver has them
courier    how rows get there from the device
segment    memory that the driver has too, where rows go
recorder   ties these together around the model's own forward
"""

EXTENSION = "eagle3compat.capture.extension.HiddenStatesWorkerExtension"
"""The worker extension, by the name under which vLLM resolves it in each worker."""
