// The block hash chain of block.py in one call: SHA-256 of (parent, tokens) per block, with the SHA instructions of x86 CPUs.

#include <cpuid.h>
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kHashBytes = 32;
constexpr int kChunkBytes = 64;

alignas(16) constexpr uint32_t kRoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

// State words a..h as the instructions want them.
struct State {
  __m128i abef;
  __m128i cdgh;
};

const State kStart = {_mm_set_epi32(0x6a09e667, 0xbb67ae85, 0x510e527f, 0x9b05688c),
                      _mm_set_epi32(0x3c6ef372, 0xa54ff53a, 0x1f83d9ab, 0x5be0cd19)};

#define WITH_SHA __attribute__((target("sha,sse4.1")))

WITH_SHA inline __m128i swap_words(__m128i words) {
  return _mm_shuffle_epi8(words, _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL));
}

// Takes in 64 bytes.
WITH_SHA inline void compress(State& state, const uint8_t* chunk) {
  __m128i words[4];
  for (int i = 0; i < 4; ++i) words[i] = swap_words(_mm_loadu_si128(reinterpret_cast<const __m128i*>(chunk) + i));
  State now = state;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    __m128i& current = words[i % 4];
    if (i >= 4) {
      // w[t] = w[t-16] + s0(w[t-15]) + w[t-7] + s1(w[t-2]), four at a time.
      const __m128i last = words[(i + 3) % 4];
      const __m128i seven_before = _mm_alignr_epi8(last, words[(i + 2) % 4], 4);
      const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(current, words[(i + 1) % 4]), seven_before);
      current = _mm_sha256msg2_epu32(sum, last);
    }
    const __m128i keys =
        _mm_add_epi32(current, _mm_load_si128(reinterpret_cast<const __m128i*>(kRoundConstants) + i));
    now.cdgh = _mm_sha256rnds2_epu32(now.cdgh, now.abef, keys);
    now.abef = _mm_sha256rnds2_epu32(now.abef, now.cdgh, _mm_shuffle_epi32(keys, 0x0e));
  }
  state.abef = _mm_add_epi32(state.abef, now.abef);
  state.cdgh = _mm_add_epi32(state.cdgh, now.cdgh);
}

WITH_SHA inline void write_hash(const State& state, uint8_t* hash) {
  const __m128i feba = _mm_shuffle_epi32(state.abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(state.cdgh, 0xb1);
  const __m128i dcba = _mm_blend_epi16(feba, dchg, 0xf0);
  const __m128i hgfe = _mm_alignr_epi8(dchg, feba, 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(hash), swap_words(dcba));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(hash) + 1, swap_words(hgfe));
}

}  // namespace

extern "C" {

// Whether this CPU has the instructions.
int moontide_can_hash_chain() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

// hashes[i] = SHA-256(parent, tokens of block i); parent is root for the first block, then hashes[i - 1].
WITH_SHA void moontide_hash_chain(const uint8_t* root, const uint8_t* tokens, int64_t block_bytes, int64_t num_blocks,
                                  uint8_t* hashes) {
  const int64_t message_bytes = kHashBytes + block_bytes;
  const uint8_t* parent = root;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const uint8_t* rest = tokens + block * block_bytes;
    const uint8_t* const end = rest + block_bytes;
    uint8_t chunk[2 * kChunkBytes] = {};
    std::memcpy(chunk, parent, kHashBytes);
    int64_t filled = kHashBytes;
    State state = kStart;
    if (block_bytes >= kChunkBytes - kHashBytes) {
      std::memcpy(chunk + kHashBytes, rest, kChunkBytes - kHashBytes);
      compress(state, chunk);
      for (rest += kChunkBytes - kHashBytes; end - rest >= kChunkBytes; rest += kChunkBytes) compress(state, rest);
      std::memset(chunk, 0, kChunkBytes);
      filled = 0;
    }
    // The tail: what is left, a bit, zeros, and the length in bits.
    std::memcpy(chunk + filled, rest, end - rest);
    filled += end - rest;
    chunk[filled] = 0x80;
    const int64_t padded = filled + 9 <= kChunkBytes ? kChunkBytes : 2 * kChunkBytes;
    const uint64_t num_bits = __builtin_bswap64(static_cast<uint64_t>(message_bytes) * 8);
    std::memcpy(chunk + padded - 8, &num_bits, 8);
    compress(state, chunk);
    if (padded > kChunkBytes) compress(state, chunk + kChunkBytes);
    uint8_t* const hash = hashes + block * kHashBytes;
    write_hash(state, hash);
    parent = hash;
  }
}
}
