from tests.cluster.test_rbac_mutations import *
from tests.cluster.test_rbac_mutations import ground
import logging
def test_alone_tmp(ground):
    ns = ground.new_namespace(None)
    with ground.operator(ns, [ns]) as operator:
        operator.wait_leading(); stay_ready(operator)
        r = tour(ground, ns, None, Pace(entitled=2))
        print("RESULT", r)
        print(operator.log.read_text()[-6000:])
del test_the_roles_are_enough_and_each_right_is_needed
