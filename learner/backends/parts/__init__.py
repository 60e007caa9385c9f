"""The training state in files: each rank writes and reads its own part.

Data flow of a checkpoint::

    rank 0                                              rank 1 … N-1
    snapshot()
      CopyCommand                  --- socket -->       copies its slices to host memory
      copies its slices                                 goes on training
    snapshot.write(folder), in a thread
      WriteCommand(folder)         ------------>        writes its part in a thread, syncs it
      writes its part              <------------        WrittenReply: file, size, digest
    learner.json: the ledger, and every part's size and digest; then the folder gets its name

Every tensor has the name and shape that it has in an undivided model. A slice is a range of the
flattened tensor, or a block of a matrix's columns, so any layout can read what any other wrote:
FSDP's rows, ZeRO's flat partitions, Megatron's rows and columns, an equal range of what several
ranks hold alike. A part is a safetensors file in the layout of ``HuggingFaceStorageWriter`` of
torch.distributed.checkpoint: flat slices and blocks, with their offsets in its header. That writer
itself is not used: it builds each file in memory, and ranks exchange its plans as pickles. Nothing
here is a pickle.

``slices`` copies, ``writing`` writes, ``part_file`` verifies, ``stored`` reads what ``boxes``
(pure) finds, ``hugging_face`` turns parts into a model that transformers loads.
"""
