"""TensorRT engines: exported graphs prepared for its parser, optimization profiles, and the GPU they are for.

    records    engines in a bundle's manifest                     plugin        the library of `redraft::TreeAttention`
    driver     the GPU, found without TensorRT                    target        TensorRT and GPU that engines are for
    tools      all that engines are built with on this machine    commands      commands of other tools for engines
    prepare    a portable graph in the form the parser takes      operators     operators of the parser, by version
    profiles   optimization profiles of every graph               memory        memory of building and running
    inputs     integers that other tools may time with            native        our operator in TensorRT's own
    expand     operators that older parsers lack                  rewrite       nodes in place of a node
    merge      weights that a graph concatenates, as one          disk          the disk space that engines need
    builder    Polygraphy's loaders over TensorRT's API           engine_cache  engines built before
    stage      all of it, for a bundle being built

TensorRT is imported only by `target` and `builder`, after `driver` has found a GPU: without a driver its objects are
null, and using them ends the process. 10.9 to 11.x are served by names that all of them have.
"""
