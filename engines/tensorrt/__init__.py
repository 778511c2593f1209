"""TensorRT engines: exported graphs prepared for its parser, optimization profiles, and the GPU they are for.

    records    engines in a bundle's manifest                     plugin        the library of `redraft::TreeAttention`
    target     TensorRT's products, and the GPU of engines        commands      commands of other tools for engines
    prepare    a portable graph in the form the parser takes      operators     operators of the parser, by version
    profiles   optimization profiles of every graph               memory        memory of building and running
    native     our operator in TensorRT's own                     expand        operators that older parsers lack
    builder    a prepared graph to an engine                      engine_cache  engines built before
    stage      all of it, for a bundle being built

TensorRT is imported only by `target` and `builder`, after `redraft.engines.gpu` has found a GPU: without a driver its
objects are null, and using them ends the process. 10.9 to 11.x are served by names that all of them have.
"""
