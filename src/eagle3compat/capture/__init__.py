"""The worker side: what runs in each vLLM worker process, in the order of a step.

extension    the class that vLLM mixes into its worker; the names that stock calls
marks        what tells before the load that a model cannot be captured
decoder      where the decoder layers and the final norm are
streams      the ways in which a layer's return value can be read as its residual stream
passing      what the next layer gets of what a layer returned
proof        which of them is right, shown by the norm after the layer
manystreams  models with several residual streams, of which vLLM says what a draft gets
scaled       models that vLLM runs with a scaled stream, which are refused
rows         which rows of a step are which request's tokens, and from which position
store        the captured rows on the host, until the driver has them
courier      how rows get there from the device
segment      memory that the driver has too, where rows go
recorder     ties these together around the model's own forward
"""

EXTENSION = "eagle3compat.capture.extension.HiddenStatesWorkerExtension"
"""The worker extension, by the name under which vLLM resolves it in each worker."""
