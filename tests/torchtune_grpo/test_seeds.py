from torchtune_grpo.seeds import mix_seed


def test_mix_seed_is_blake2b_of_the_numbers():
    # `printf '1,2' | b2sum -l 64`, without its last bit
    assert mix_seed(1, 2) == 0xAE880AC53CE9C3F5 >> 1


def test_mix_seed_tells_order_number_and_sign_of_arguments_apart():
    seeds = [mix_seed(*a) for a in [(1, 2), (2, 1), (12,), (1,), (1, 2, 0), (-1, 2), (1, -2), ()]]
    assert len(set(seeds)) == len(seeds)


def test_mix_seed_fits_a_signed_64_bit_tensor():
    assert all(0 <= mix_seed(step) < 2**63 for step in range(1000))
