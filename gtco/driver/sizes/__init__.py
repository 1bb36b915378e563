"""Libraries of several sizes, from the options to the one artifact.

- ``ways``: which range of the options is one of batches, and which are lists; what a model allows
- ``plan``: the variants that follow from one of these ways
- ``dynamic_shapes``: what ``torch.export`` says of sizes, as options
- ``proofs``, ``parts``: a model that computes each sample by itself runs any batch in a few parts:
  the proof, and which parts the library gets
- ``batches``: a batch of one size that is faster in parts
- ``dimensions``: the sizes that a model leaves open
- ``many``: more than four sizes, most of which take what others have: ``anchors`` (the sizes that
  choose configs), ``forms`` (the configs of each kind of stage), ``sharing`` (one kernel for stages
  that differ in numbers)
- ``shared``, ``layouts``: what the sizes have in common: the file, constants, kernels, and few
  layouts of each weight
- ``variants``: the sizes in one artifact
"""
