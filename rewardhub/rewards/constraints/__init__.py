"""The 25 kinds of verifiable instructions of IFEval, in the forms of public data sets.

Zhou et al., Instruction-Following Evaluation for Large Language Models, arXiv 2311.07911. Every
check is pure and takes time linear in the text; ``ifeval.KINDS`` lists the kinds by their ids,
``rlvr.FUNCTIONS`` the same by the function names of RLVR-IFeval.
"""
