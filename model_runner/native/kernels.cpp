// Kernels of a stage in bfloat16, for CPUs with AVX512-BF16 (and AMX, if there is): attention over paged K/V, linear
// layers, RMS norms.
//
// One rule holds for everything here: a row's sums run in an order that depends on the row alone (its position, its
// keys, the weights), never on what else is in the call. So K/V of a prompt have the same bits for any chunk plan, any
// packing and any number of threads, and a cached prefix equals a recomputed one. It is kept by these means:
//   - each product of a row is one chain of fused multiply-adds, along pairs of adjacent inputs, in ascending order;
//   - key blocks start at multiples of kBlockKeys, counted from position 0, and the softmax is updated block by block;
//   - a key that a row may not see gets the weight zero exactly, so seeing a tile that is all masked changes no bit.
//
// Both products are made of one tile: up to 6 rows times 64 columns, or with AMX 16 or 32 rows times 64. Both kinds of
// instructions multiply pairs of bfloat16 that lie side by side, so the columns (keys, values, weights) are packed as
// pairs first:
//   keys    [tile of 64 keys][H/2][64]   pairs of adjacent dimensions
//   values  [block keys / 2][H]          pairs of adjacent keys
//   weights [panel of 64 outputs][I/2][64]
// AMX sums in another order than vdpbf16ps, so a call uses one of the two for all of its rows, by what the CPU has and by
// the number of inputs. It multiplies whole tiles of 16 rows; where rows are missing or do not lie evenly they are packed
// first, [16 rows][32 numbers] after [16 rows][32 numbers].
//
// The caller checks shapes, dtypes and the CPU. Shapes: T rows of the step, N query heads, K KV heads, H head size,
// I inputs and O outputs of a linear layer.

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

using bf16 = uint16_t;
using Pair = uint32_t;  // two bfloat16, the unit that vdpbf16ps multiplies

constexpr int kLanes = 16;        // float32 in one register
constexpr int kTileColumns = 64;  // four registers
constexpr int kTileRows = 6;      // 6 x 4 sums + 4 columns + 1 broadcast value: 29 of 32 registers
constexpr int kBlockKeys = 512;   // packed keys and values of a block stay in the second-level cache
constexpr int kTilePairs = kTileColumns / 2;
constexpr int64_t kTaskRows = 768;    // rows that share one packing of the keys; their sums stay in the same cache
constexpr int64_t kPanelPairs = 1024; // weights of one panel that are met before the next rows: 256 KiB
constexpr int64_t kPanelRows = 384;   // rows that meet all panels before the next rows
constexpr int kPrefetchPairs = 1024;  // 4 KiB

constexpr int kAmxRows = 16;            // of one tile register
constexpr int kAmxPairs = 16;           // pairs that one instruction sums
constexpr int64_t kAmxPanelRows = 192;  // its steps are short, so the rows have to be nearer

constexpr float kLog2e = 1.44269504f;
constexpr float kNever = -std::numeric_limits<float>::infinity();

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }


// ---------------------------------------------------------------------------------------------------------- products

// Memory to fetch while a tile is computed: the next 64 pairs at every step.
struct Ahead {
    const Pair* at;
    int64_t step;
};

Ahead same_columns(const Pair* columns, int64_t column_stride) { return {columns + kPrefetchPairs, column_stride}; }

// out[M][16 * V] = (accumulate ? out : 0) + rows[M][2 * num_pairs] * columns[num_pairs][16 * V]
template <int M, int V>
__attribute__((always_inline)) inline void multiply_tile(const bf16* const* rows, const Pair* columns,
                                                         int64_t column_stride, int64_t num_pairs, float* out,
                                                         int64_t out_stride, bool accumulate, Ahead ahead) {
    __m512 sums[M][V];
// Without the unrolling, the sums would go through the stack on their way in and out.
#pragma GCC unroll 6
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < V; j++)
            sums[i][j] = accumulate ? _mm512_loadu_ps(out + i * out_stride + kLanes * j) : _mm512_setzero_ps();
    const bf16* row[M];
    for (int i = 0; i < M; i++) row[i] = rows[i];
    for (int64_t pair = 0; pair < num_pairs; pair++, columns += column_stride, ahead.at += ahead.step) {
        __m512bh column[V];
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead.at + kLanes * j), _MM_HINT_T0);
            column[j] = (__m512bh)_mm512_loadu_si512(columns + kLanes * j);
        }
#pragma GCC unroll 6
        for (int i = 0; i < M; i++) {
            int32_t value;
            std::memcpy(&value, row[i] + 2 * pair, sizeof value);
            __m512bh broadcast = (__m512bh)_mm512_set1_epi32(value);
#pragma GCC unroll 4
            for (int j = 0; j < V; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], broadcast, column[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) _mm512_storeu_ps(out + i * out_stride + kLanes * j, sums[i][j]);
}

template <int V>
void multiply(int num_rows, const bf16* const* rows, const Pair* columns, int64_t column_stride, int64_t num_pairs,
              float* out, int64_t out_stride, bool accumulate, Ahead ahead) {
    switch (num_rows) {
        case 1: return multiply_tile<1, V>(rows, columns, column_stride, num_pairs, out, out_stride, accumulate, ahead);
        case 2: return multiply_tile<2, V>(rows, columns, column_stride, num_pairs, out, out_stride, accumulate, ahead);
        case 3: return multiply_tile<3, V>(rows, columns, column_stride, num_pairs, out, out_stride, accumulate, ahead);
        case 4: return multiply_tile<4, V>(rows, columns, column_stride, num_pairs, out, out_stride, accumulate, ahead);
        case 5: return multiply_tile<5, V>(rows, columns, column_stride, num_pairs, out, out_stride, accumulate, ahead);
        case 6: return multiply_tile<6, V>(rows, columns, column_stride, num_pairs, out, out_stride, accumulate, ahead);
    }
}

#if defined(__x86_64__) && __GNUC__ >= 11

constexpr bool kCompiledForAmx = true;

// The compiler does not know what the tile instructions read.
#define MEMORY_IS_READ(address) asm volatile("" ::"r"(address) : "memory")

// Lets one task use the tile registers, all of 16 rows of 64 bytes.
class AmxTask {
   public:
    __attribute__((target("amx-tile"))) explicit AmxTask(bool is_wanted) : is_wanted_(is_wanted) {
        if (!is_wanted) return;
        alignas(64) struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {kAmxRows, kAmxRows, kAmxRows, kAmxRows, kAmxRows, kAmxRows, kAmxRows, kAmxRows};
        } config;
        MEMORY_IS_READ(&config);
        _tile_loadconfig(&config);
    }
    __attribute__((target("amx-tile"))) ~AmxTask() {
        if (is_wanted_) _tile_release();
    }

   private:
    bool is_wanted_;
};

struct AmxRows {  // rows of bfloat16 in tiles, as strides in elements
    const bf16* at;
    int64_t row_stride;
    int64_t step_stride;  // to the next 32 numbers of the rows
    int64_t tile_stride;  // to the next 16 rows
};

// out[16 * N][32 * num_halves] = (accumulate ? out : 0) + rows[16 * N][2 * num_pairs] * columns[num_pairs][32 * num_halves]
template <int N>
__attribute__((noinline, target("amx-tile,amx-bf16"))) void multiply_rows(AmxRows rows, const Pair* columns,
                                                                          int64_t column_stride, int64_t num_pairs,
                                                                          float* out, int64_t out_stride,
                                                                          bool accumulate, int num_halves) {
    MEMORY_IS_READ(rows.at);
    int64_t row_bytes = rows.row_stride * sizeof(bf16), column_bytes = column_stride * sizeof(Pair),
            out_bytes = out_stride * sizeof(float);
    for (int half = 0; half < num_halves; half++, columns += 32, out += 32) {
        float* lower_out = out + kAmxRows * out_stride;
        if (accumulate) {
            _tile_loadd(0, out, out_bytes);
            _tile_loadd(1, out + 16, out_bytes);
            if constexpr (N == 2) {
                _tile_loadd(2, lower_out, out_bytes);
                _tile_loadd(3, lower_out + 16, out_bytes);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        const bf16* upper = rows.at;
        const bf16* lower = rows.at + rows.tile_stride;
        const Pair* column = columns;
        for (int64_t pair = 0; pair < num_pairs; pair += kAmxPairs) {
            _tile_loadd(4, upper, row_bytes);
            _tile_loadd(6, column, column_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, column + 16, column_bytes);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (N == 2) {
                _tile_loadd(5, lower, row_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            upper += rows.step_stride;
            lower += rows.step_stride;
            column += kAmxPairs * column_stride;
        }
        _tile_stored(0, out, out_bytes);
        _tile_stored(1, out + 16, out_bytes);
        if constexpr (N == 2) {
            _tile_stored(2, lower_out, out_bytes);
            _tile_stored(3, lower_out + 16, out_bytes);
        }
    }
}

#else

constexpr bool kCompiledForAmx = false;

struct AmxTask {
    explicit AmxTask(bool) {}
};

struct AmxRows {
    const bf16* at;
    int64_t row_stride, step_stride, tile_stride;
};

template <int N>
void multiply_rows(AmxRows, const Pair*, int64_t, int64_t, float*, int64_t, bool, int) {}

#endif

// Up to 32 rows, of which those beyond num_rows up to a whole tile are computed too: `out` has room for them.
void multiply_with_amx(int64_t num_rows, AmxRows rows, const Pair* columns, int64_t column_stride, int64_t num_pairs,
                       float* out, int64_t out_stride, bool accumulate, int num_halves) {
    auto multiply = num_rows > kAmxRows ? multiply_rows<2> : multiply_rows<1>;
    multiply(rows, columns, column_stride, num_pairs, out, out_stride, accumulate, num_halves);
}

int64_t whole_tiles(int64_t num_rows) { return ceil_div(num_rows, kAmxRows) * kAmxRows; }

// Up to 16 rows of `width` numbers (a multiple of 32) in the order in which AMX reads them; absent rows are zero.
void pack_rows(const bf16* const* rows, int64_t num_rows, int64_t width, bf16* out) {
    for (int64_t first = 0; first < width; first += 32)
        for (int64_t i = 0; i < kAmxRows; i++, out += 32) {
            __m512i numbers = i < num_rows ? _mm512_loadu_si512(rows[i] + first) : _mm512_setzero_si512();
            _mm512_storeu_si512(out, numbers);
        }
}

// How many of `remaining` rows to take next: groups of nearly equal size, for a lone last row reads as much as six.
int next_group(int64_t remaining) { return static_cast<int>(ceil_div(remaining, ceil_div(remaining, kTileRows))); }

// ----------------------------------------------------------------------------------------------------------- packing

// 16 rows of 16 pairs become 16 columns: out[pair * kTileColumns + row].
void transpose_pairs(const bf16* const* rows, int64_t first, Pair* out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + first);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // Now 128-bit lane l of a[4 * i + c] holds column 4 * l + c of rows 4 * i .. 4 * i + 3.
    for (int c = 0; c < 4; c++) {
        __m512i even_low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
        __m512i odd_low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        __m512i even_high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        __m512i odd_high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_si512(out + c * kTileColumns, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
        _mm512_storeu_si512(out + (4 + c) * kTileColumns, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
        _mm512_storeu_si512(out + (8 + c) * kTileColumns, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
        _mm512_storeu_si512(out + (12 + c) * kTileColumns, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
    }
}

// Rows that become one tile: tokens of a plane, or outputs of a weight.
struct TileRows {
    const bf16* at[kTileColumns];

    void prefetch(int row, int64_t column) const {
        _mm_prefetch(reinterpret_cast<const char*>(at[row] + column), _MM_HINT_T0);
    }
};

// 64 rows of `width` numbers (even) become one tile of columns: out[width / 2][64]. The rows of the tile that is packed
// next are fetched a few at a time between the transposes: all at once, they would fill the queue to memory and nothing
// would be computed meanwhile.
void pack_columns(const TileRows& rows, const TileRows& next, int64_t width, Pair* out) {
    int64_t whole = width - width % 32;
    for (int group = 0; group < kTileColumns; group += kLanes) {
        for (int64_t first = 0; first < whole; first += 32) {
            for (int i = 0; i < kLanes; i++) next.prefetch(group + i, first);
            transpose_pairs(rows.at + group, first, out + first / 2 * kTileColumns + group);
        }
        for (int64_t first = whole; first < width; first += 2)
            for (int i = 0; i < kLanes; i++)
                std::memcpy(out + first / 2 * kTileColumns + group + i, rows.at[group + i] + first, sizeof(Pair));
    }
}

// 64 rows of `width` numbers (a multiple of 32) become pairs of rows: out[32][width]. Fetches `next` on the way.
void pack_row_pairs(const TileRows& rows, const TileRows& next, int64_t width, Pair* out) {
    alignas(64) static const uint16_t kOrder[2][32] = {
        {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    __m512i low = _mm512_load_si512(kOrder[0]), high = _mm512_load_si512(kOrder[1]);
    for (int row = 0; row < kTileColumns; row += 2) {
        for (int64_t column = 0; column < width; column += 32, out += 32) {
            next.prefetch(row, column);
            next.prefetch(row + 1, column);
            __m512i even = _mm512_loadu_si512(rows.at[row] + column);
            __m512i odd = _mm512_loadu_si512(rows.at[row + 1] + column);
            _mm512_storeu_si512(out, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(out + kLanes, _mm512_permutex2var_epi16(even, high, odd));
        }
    }
}

// ----------------------------------------------------------------------------------------------------------- softmax

// 2^t for t <= 0 or a little above, relative error 3e-6; exactly zero below the smallest normal number.
__m512 exp2(__m512 t) {
    // "Not less": a NaN stays a NaN, as it does in torch.
    __mmask16 counts = _mm512_cmp_ps_mask(t, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_sub_ps(t, whole);
    __m512 power = _mm512_set1_ps(0.00958277f);
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(0.05590623f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(0.24024099f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(0.69312422f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(counts, power, whole);
}

// scores = cap * tanh(scores * inner)
void soften(float* scores, int64_t count, float inner, float cap) {
    __m512 doubled = _mm512_set1_ps(2 * kLog2e * inner), most = _mm512_set1_ps(60.0f), one = _mm512_set1_ps(1.0f);
    for (int64_t j = 0; j < count; j += kLanes) {
        // tanh(x) = (e^2x - 1) / (e^2x + 1), which is 1 in float32 long before 2^60.
        __m512 t = _mm512_mul_ps(_mm512_loadu_ps(scores + j), doubled);
        __m512 grown = exp2(_mm512_min_ps(most, t));
        __m512 tanh = _mm512_div_ps(_mm512_sub_ps(grown, one), _mm512_add_ps(grown, one));
        _mm512_storeu_ps(scores + j, _mm512_mul_ps(tanh, _mm512_set1_ps(cap)));
    }
}

// --------------------------------------------------------------------------------------------------------- attention

struct Segment {        // rows of one request; mirrors a row of `segments` in kernels.py
    int64_t first_row;  // in the step
    int64_t num_rows;
    int64_t start;  // position of the first row
    int64_t table;  // where its page numbers start in `tables`
};

struct Pages {  // K/V pages of one layer, as strides in elements; mirrored in kernels.py
    bf16* base;
    int64_t page_stride, plane_stride, head_stride, token_stride;
    int64_t page_tokens;
};

struct Attention {  // one layer of one step; mirrored in kernels.py
    Pages pages;
    const Segment* segments;
    int64_t num_segments;
    const int64_t* tables;
    const bf16* query;  // row and head strides in elements
    int64_t query_row_stride, query_head_stride;
    bf16* out;  // [T][N][H]
    int64_t num_heads, num_kv_heads, head_dim;
    const float* sinks;  // one per query head, or null
    float scaling;
    float softcap;   // 0: none
    int64_t window;  // 0: none
    int64_t has_amx;
};

enum Plane { kKeys = 0, kValues = 1 };

int64_t row_group(const Attention& call) { return call.num_heads / call.num_kv_heads; }

struct Scratch {  // grows to the largest task of its thread
    std::vector<Pair> keys, values;
    std::vector<float> scores, sums, peaks, totals;
    std::vector<bf16> weights, zeros, packed_rows;
    std::vector<const bf16*> rows;
};

Scratch& scratch_of_thread() {
    static thread_local Scratch scratch;
    return scratch;
}

// Rows of one KV head: positions [first, first + count) of a segment times the query heads of that KV head. Row r is
// position first + r / group, head kv_head * group + r % group.
class RowTask {
   public:
    RowTask(const Attention& call, const Segment& segment, int64_t kv_head, int64_t first, int64_t count)
        : call_(call),
          segment_(segment),
          tables_(call.tables + segment.table),
          kv_head_(kv_head),
          group_(row_group(call)),
          first_(first),
          num_rows_(count * group_),
          head_dim_(call.head_dim),
          is_small_(num_rows_ <= 2 * kTileRows),
          log2_per_score_(kLog2e * (call.softcap > 0 ? 1.0f : call.scaling)),
          scratch_(scratch_of_thread()) {
        // Few rows pack one tile at a time, which stays in the first-level cache; many rows pack a whole block.
        int64_t packed_keys = is_small_ ? kTileColumns : kBlockKeys;
        int64_t scored_rows = call.has_amx ? 2 * kAmxRows : is_small_ ? num_rows_ : kTileRows;
        scratch_.keys.resize(packed_keys * head_dim_ / 2 + kPrefetchPairs);
        scratch_.values.resize(packed_keys * head_dim_ / 2 + kPrefetchPairs);
        scratch_.scores.resize(scored_rows * kBlockKeys);
        scratch_.weights.resize(scored_rows * kBlockKeys);
        scratch_.sums.assign(whole_tiles(num_rows_) * head_dim_, 0.0f);
        scratch_.zeros.assign(head_dim_, 0);
        scratch_.rows.resize(num_rows_);
        scratch_.peaks.resize(num_rows_);
        scratch_.totals.resize(num_rows_);
        for (int64_t r = 0; r < num_rows_; r++) {
            int64_t head = kv_head_ * group_ + r % group_;
            int64_t row = segment.first_row + position_of(r) - segment.start;
            scratch_.rows[r] = call.query + row * call.query_row_stride + head * call.query_head_stride;
            scratch_.peaks[r] = call.sinks ? call.sinks[head] * kLog2e : kNever;
            scratch_.totals[r] = call.sinks ? 1.0f : 0.0f;
        }
        if (!call.has_amx) return;
        scratch_.packed_rows.resize(whole_tiles(num_rows_) * head_dim_);
        for (int64_t r = 0; r < num_rows_; r += kAmxRows)
            pack_rows(scratch_.rows.data() + r, std::min<int64_t>(kAmxRows, num_rows_ - r), head_dim_,
                      scratch_.packed_rows.data() + r * head_dim_);
    }

    void run() {
        int64_t lowest = call_.window ? std::max<int64_t>(0, first_ - call_.window + 1) : 0;
        int64_t end = position_of(num_rows_ - 1) + 1;
        for (int64_t block = lowest - lowest % kBlockKeys; block < end; block += kBlockKeys) {
            if (is_small_)
                meet_tile_by_tile(block);
            else
                meet_block(block);
        }
        write_result();
    }

   private:
    struct Tiles {
        int first, end;
    };

    int next_rows(int64_t remaining) const {
        return call_.has_amx ? static_cast<int>(std::min<int64_t>(2 * kAmxRows, remaining)) : next_group(remaining);
    }

    int64_t position_of(int64_t r) const { return first_ + r / group_; }

    // Tiles of a block that hold a key which one of rows [row, row + count) sees.
    Tiles visible_tiles(int64_t block, int64_t row, int64_t count) const {
        int64_t end = std::min<int64_t>(kBlockKeys, position_of(row + count - 1) + 1 - block);
        int64_t first = call_.window ? std::max<int64_t>(0, position_of(row) - call_.window + 1 - block) : 0;
        if (first >= end) return {0, 0};
        return {static_cast<int>(first / kTileColumns), static_cast<int>(ceil_div(end, kTileColumns))};
    }

    void meet_block(int64_t block) {
        Tiles packed = visible_tiles(block, 0, num_rows_);
        TileRows keys = find_tokens(block + packed.first * kTileColumns, kKeys);
        for (int tile = packed.first; tile < packed.end; tile++) {
            TileRows values = find_tokens(block + tile * kTileColumns, kValues);
            pack_columns(keys, values, head_dim_, scratch_.keys.data() + tile * kTilePairs * head_dim_);
            keys = find_tokens(block + (tile + 1) * kTileColumns, kKeys);
            pack_row_pairs(values, keys, head_dim_, scratch_.values.data() + tile * kTilePairs * head_dim_);
        }
        for (int64_t row = 0; row < num_rows_;) {
            int count = next_rows(num_rows_ - row);
            Tiles tiles = visible_tiles(block, row, count);
            for (int tile = tiles.first; tile < tiles.end; tile++)
                score(row, count, scratch_.keys.data() + tile * kTilePairs * head_dim_, 0, tile);
            if (tiles.first < tiles.end) {
                weigh(row, count, 0, block, tiles);
                add_values(row, count, scratch_.values.data() + tiles.first * kTilePairs * head_dim_, 0, tiles);
            }
            row += count;
        }
    }

    void meet_tile_by_tile(int64_t block) {
        Tiles tiles = visible_tiles(block, 0, num_rows_);
        if (tiles.first == tiles.end) return;
        int64_t first = block + tiles.first * kTileColumns;
        TileRows tokens = find_tokens(first, kKeys);
        for (int tile = tiles.first; tile < tiles.end; tile++) {
            TileRows next = tile + 1 < tiles.end ? find_tokens(block + (tile + 1) * kTileColumns, kKeys)
                                                 : find_tokens(first, kValues);
            pack_columns(tokens, next, head_dim_, scratch_.keys.data());
            tokens = next;
            for (int64_t row = 0; row < num_rows_;) {
                int count = next_rows(num_rows_ - row);
                score(row, count, scratch_.keys.data(), row, tile);
                row += count;
            }
        }
        weigh(0, static_cast<int>(num_rows_), 0, block, tiles);
        for (int tile = tiles.first; tile < tiles.end; tile++) {
            TileRows next = find_tokens(block + (tile + 1) * kTileColumns, tile + 1 < tiles.end ? kValues : kKeys);
            pack_row_pairs(tokens, next, head_dim_, scratch_.values.data());
            tokens = next;
            for (int64_t row = 0; row < num_rows_;) {
                int count = next_rows(num_rows_ - row);
                add_values(row, count, scratch_.values.data(), row, {tile, tile + 1});
                row += count;
            }
        }
    }

    // 64 tokens of a plane. Places after the segment's last row may hold anything, even NaN: zeros instead.
    TileRows find_tokens(int64_t position, Plane plane) const {
        const Pages& pages = call_.pages;
        int64_t written = segment_.start + segment_.num_rows;
        TileRows tokens;
        int filled = 0;
        while (filled < kTileColumns && position < written) {
            int64_t offset = position % pages.page_tokens;
            int64_t count = std::min({pages.page_tokens - offset, written - position, int64_t{kTileColumns} - filled});
            const bf16* token = pages.base + tables_[position / pages.page_tokens] * pages.page_stride +
                                plane * pages.plane_stride + kv_head_ * pages.head_stride + offset * pages.token_stride;
            for (int64_t i = 0; i < count; i++) tokens.at[filled++] = token + i * pages.token_stride;
            position += count;
        }
        while (filled < kTileColumns) tokens.at[filled++] = scratch_.zeros.data();
        return tokens;
    }

    // Scores of rows [row, row + count) and one tile of keys, into places [place, place + count).
    void score(int64_t row, int count, const Pair* keys, int64_t place, int tile) {
        if (call_.has_amx) {
            AmxRows rows = {scratch_.packed_rows.data() + row * head_dim_, 32, 32 * kAmxRows, kAmxRows * head_dim_};
            return multiply_with_amx(count, rows, keys, kTileColumns, head_dim_ / 2,
                                     scratch_.scores.data() + place * kBlockKeys + tile * kTileColumns, kBlockKeys,
                                     false, 2);
        }
        multiply<4>(count, scratch_.rows.data() + row, keys, kTileColumns, head_dim_ / 2,
                    scratch_.scores.data() + place * kBlockKeys + tile * kTileColumns, kBlockKeys, false,
                    same_columns(keys, kTileColumns));
    }

    // Turns the scores of some tiles into weights relative to each row's peak so far. All peaks first: a peak is a long
    // chain of steps that wait for each other, which the exponentials of the row before can hide.
    void weigh(int64_t row, int count, int64_t place, int64_t block, Tiles tiles) {
        int64_t first = tiles.first * kTileColumns, end = tiles.end * kTileColumns;
        for (int i = 0; i < count; i++) {
            float* scores = scratch_.scores.data() + (place + i) * kBlockKeys;
            if (call_.softcap > 0)
                soften(scores + first, end - first, call_.scaling / call_.softcap, call_.softcap);
            hide_unseen(row + i, block, first, end, scores);
            raise_peak(row + i, highest(scores, first, end) * log2_per_score_);
        }
        for (int i = 0; i < count; i++) exponentiate(row + i, place + i, first, end);
    }

    // Sums so far are relative to the old peak.
    void raise_peak(int64_t row, float peak) {
        if (peak <= scratch_.peaks[row]) return;
        __m512 shrink = exp2(_mm512_set1_ps(scratch_.peaks[row] - peak));
        float* sums = scratch_.sums.data() + row * head_dim_;
        for (int64_t d = 0; d < head_dim_; d += kLanes)
            _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), shrink));
        scratch_.totals[row] *= _mm512_cvtss_f32(shrink);
        scratch_.peaks[row] = peak;
    }

    void exponentiate(int64_t row, int64_t place, int64_t first, int64_t end) {
        const float* scores = scratch_.scores.data() + place * kBlockKeys;
        bf16* weights = scratch_.weights.data() + place * kBlockKeys;
        float peak = scratch_.peaks[row];
        if (peak == kNever) {
            std::fill(weights + first, weights + end, bf16{0});
            return;
        }
        __m512 slope = _mm512_set1_ps(log2_per_score_), shift = _mm512_set1_ps(peak);
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int64_t j = first; j < end; j += 2 * kLanes) {
            __m512 low = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + j), slope, shift));
            __m512 high = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + j + kLanes), slope, shift));
            even = _mm512_add_ps(even, low);
            odd = _mm512_add_ps(odd, high);
            _mm512_storeu_si512(weights + j, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
        scratch_.totals[row] += _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
    }

    void hide_unseen(int64_t row, int64_t block, int64_t first, int64_t end, float* scores) const {
        int64_t position = position_of(row);
        for (int64_t j = std::max(first, position + 1 - block); j < end; j++) scores[j] = kNever;
        if (!call_.window) return;
        int64_t seen = std::min(end, position - call_.window + 1 - block);
        for (int64_t j = first; j < seen; j++) scores[j] = kNever;
    }

    static float highest(const float* scores, int64_t first, int64_t end) {
        __m512 most[4];
        for (int j = 0; j < 4; j++) most[j] = _mm512_set1_ps(kNever);
        for (int64_t at = first; at < end; at += kTileColumns)
            for (int j = 0; j < 4; j++) most[j] = _mm512_max_ps(_mm512_loadu_ps(scores + at + kLanes * j), most[j]);
        return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3])));
    }

    // Adds weights x values of some tiles to the sums of rows [row, row + count).
    void add_values(int64_t row, int count, const Pair* values, int64_t place, Tiles tiles) {
        const bf16* first = scratch_.weights.data() + place * kBlockKeys + tiles.first * kTileColumns;
        int64_t num_pairs = (tiles.end - tiles.first) * kTilePairs;
        float* sums = scratch_.sums.data() + row * head_dim_;
        if (call_.has_amx)
            return multiply_with_amx(count, {first, kBlockKeys, 32, kAmxRows * kBlockKeys}, values, head_dim_, num_pairs,
                                     sums, head_dim_, true, static_cast<int>(head_dim_ / 32));
        const bf16* weights[kTileRows];
        for (int i = 0; i < count; i++) weights[i] = first + i * kBlockKeys;
        int64_t d = 0;
        for (; d + kTileColumns <= head_dim_; d += kTileColumns)
            multiply<4>(count, weights, values + d, head_dim_, num_pairs, sums + d, head_dim_, true,
                        same_columns(values + d, head_dim_));
        if (d < head_dim_)
            multiply<2>(count, weights, values + d, head_dim_, num_pairs, sums + d, head_dim_, true,
                        same_columns(values + d, head_dim_));
    }

    void write_result() const {
        for (int64_t r = 0; r < num_rows_; r++) {
            int64_t row = segment_.first_row + position_of(r) - segment_.start;
            bf16* out = call_.out + (row * call_.num_heads + kv_head_ * group_ + r % group_) * head_dim_;
            const float* sums = scratch_.sums.data() + r * head_dim_;
            __m512 share = _mm512_set1_ps(1.0f / scratch_.totals[r]);
            for (int64_t d = 0; d < head_dim_; d += kLanes) {
                __m256bh rounded = _mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(sums + d), share));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d), (__m256i)rounded);
            }
        }
    }

    const Attention& call_;
    const Segment& segment_;
    const int64_t* tables_;
    int64_t kv_head_, group_, first_, num_rows_, head_dim_;
    bool is_small_;
    float log2_per_score_;
    Scratch& scratch_;
};

struct Task {
    int64_t segment, kv_head, first, count;
};

std::vector<Task> plan_tasks(const Attention& call) {
    std::vector<Task> tasks;
    int64_t most = std::max<int64_t>(1, kTaskRows / row_group(call));
    for (int64_t s = 0; s < call.num_segments; s++) {
        const Segment& segment = call.segments[s];
        for (int64_t kv_head = 0; kv_head < call.num_kv_heads; kv_head++)
            for (int64_t done = 0; done < segment.num_rows; done += most)
                tasks.push_back({s, kv_head, segment.start + done, std::min(most, segment.num_rows - done)});
    }
    return tasks;
}

// ------------------------------------------------------------------------------------------------------------ linear

struct Linear {  // mirrored in kernels.py
    const bf16* input;  // [T][I] with a row stride
    int64_t input_stride;
    const Pair* weight;  // packed
    const Pair* gate;    // packed, or null; with it the result is silu(input x gate) * (input x weight), without a bias
    const bf16* bias;    // [O], or null
    bf16* out;           // [T][O]
    int64_t num_rows, num_inputs, num_outputs;
    int64_t has_amx;

    bool uses_amx() const { return has_amx && num_inputs % (2 * kAmxPairs) == 0; }
};

__m512 widen(__m256i numbers) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16)); }

__m512 silu(__m512 x) {
    __m512 grown = exp2(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2e)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), grown));
}

// Finishes float32 sums of one panel and a few rows, and rounds them into the output.
void write_panel(const Linear& call, int64_t panel, int64_t first_row, int64_t count, const float* sums,
                 const float* gates) {
    int64_t column = panel * kTileColumns;
    for (int j = 0; j < kTileColumns && column + j < call.num_outputs; j += kLanes) {
        int64_t width = std::min<int64_t>(kLanes, call.num_outputs - column - j);
        __mmask16 valid = static_cast<__mmask16>((1u << width) - 1);
        __m512 bias = _mm512_setzero_ps();
        if (call.bias) bias = widen(_mm256_maskz_loadu_epi16(valid, call.bias + column + j));
        for (int64_t i = 0; i < count; i++) {
            __m512 sum = _mm512_add_ps(_mm512_loadu_ps(sums + i * kTileColumns + j), bias);
            if (call.gate) sum = _mm512_mul_ps(sum, silu(_mm512_loadu_ps(gates + i * kTileColumns + j)));
            bf16* out = call.out + (first_row + i) * call.num_outputs + column + j;
            _mm256_mask_storeu_epi16(out, valid, (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}

// Rows [first, end) x one panel of `weight`; `finish(row, count)` is called when the sums of these rows are complete.
template <typename Finish>
void multiply_panel(const Linear& call, const Pair* weight, int64_t panel, int64_t first, int64_t end, float* sums,
                    Finish finish) {
    int64_t num_pairs = call.num_inputs / 2, num_rows = end - first;
    weight += panel * num_pairs * kTileColumns;
    for (int64_t pair = 0; pair < num_pairs; pair += kPanelPairs) {
        int64_t met_pairs = std::min(kPanelPairs, num_pairs - pair);
        const Pair* met = weight + pair * kTileColumns;
        for (int64_t row = first; row < end;) {
            int count = next_group(end - row);
            const bf16* rows[kTileRows];
            for (int i = 0; i < count; i++) rows[i] = call.input + (row + i) * call.input_stride + 2 * pair;
            // Each group of rows fetches its share of the weights that all of them meet next, which lie behind these.
            // One group alone is bound by how fast its own weights arrive.
            Ahead ahead = {met + (met_pairs + met_pairs * (row - first) / num_rows) * kTileColumns,
                           ceil_div(count * kTileColumns, num_rows)};
            if (num_rows <= kTileRows) ahead = same_columns(met, kTileColumns);
            multiply<4>(count, rows, met, kTileColumns, met_pairs, sums + (row - first) * kTileColumns, kTileColumns,
                        pair > 0, ahead);
            if (pair + met_pairs == num_pairs) finish(row, count);
            row += count;
        }
    }
}

// The same with AMX; `last_rows` are those of the last group, packed, if it is no whole tile.
template <typename Finish>
void multiply_panel_with_amx(const Linear& call, const bf16* last_rows, const Pair* weight, int64_t panel, int64_t first,
                             int64_t end, float* sums, Finish finish) {
    int64_t num_pairs = call.num_inputs / 2;
    weight += panel * num_pairs * kTileColumns;
    for (int64_t pair = 0; pair < num_pairs; pair += kPanelPairs) {
        int64_t met_pairs = std::min(kPanelPairs, num_pairs - pair);
        for (int64_t row = first; row < end; row += 2 * kAmxRows) {
            int64_t count = std::min<int64_t>(2 * kAmxRows, end - row);
            AmxRows met = {call.input + row * call.input_stride + 2 * pair, call.input_stride, 32,
                           kAmxRows * call.input_stride};
            if (count % kAmxRows)
                met = {last_rows + 2 * pair * kAmxRows, 32, 32 * kAmxRows, kAmxRows * call.num_inputs};
            multiply_with_amx(count, met, weight + pair * kTileColumns, kTileColumns, met_pairs,
                              sums + (row - first) * kTileColumns, kTileColumns, pair > 0, 2);
            if (pair + met_pairs == num_pairs) finish(row, count);
        }
    }
}

// `last_rows`: as above, or null without AMX.
void compute_panel(const Linear& call, const bf16* last_rows, int64_t panel, int64_t first, int64_t end) {
    static thread_local std::vector<float> sums, gates;
    sums.resize(whole_tiles(end - first) * kTileColumns);
    gates.resize(call.gate ? sums.size() : 0);
    auto multiply_by = [&](const Pair* weight, float* out, auto finish) {
        if (last_rows)
            multiply_panel_with_amx(call, last_rows, weight, panel, first, end, out, finish);
        else
            multiply_panel(call, weight, panel, first, end, out, finish);
    };
    if (call.gate) multiply_by(call.gate, gates.data(), [](int64_t, int64_t) {});
    // Rows are written one group after the other: all at once, their lines would have to be waited for.
    multiply_by(call.weight, sums.data(), [&](int64_t row, int64_t count) {
        int64_t place = (row - first) * kTileColumns;
        write_panel(call, panel, row, count, sums.data() + place, gates.data() + place);
    });
}

// -------------------------------------------------------------------------------------------------------------- norm

// out = row / rms(row) * weight, for a row of any width.
void normalize(const bf16* row, const bf16* weight, int64_t width, float epsilon, bf16* out) {
    auto valid_at = [&](int64_t i) { return static_cast<__mmask16>((1u << std::min<int64_t>(kLanes, width - i)) - 1); };
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += kLanes) {
        __m512 x = widen(_mm256_maskz_loadu_epi16(valid_at(i), row + i));
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / width + epsilon));
    for (int64_t i = 0; i < width; i += kLanes) {
        __m512 x = _mm512_mul_ps(widen(_mm256_maskz_loadu_epi16(valid_at(i), row + i)), scale);
        x = _mm512_mul_ps(x, widen(_mm256_maskz_loadu_epi16(valid_at(i), weight + i)));
        _mm256_mask_storeu_epi16(out + i, valid_at(i), (__m256i)_mm512_cvtneps_pbh(x));
    }
}

}  // namespace

extern "C" {

// Asks Linux for the tile registers, once per process. 0: there are none.
int moontide_has_amx() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return kCompiledForAmx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Puts rows of keys and values [K][T][H] (strides in elements) where their positions live in the pages.
void moontide_write(const Pages* pages, const Segment* segments, int64_t num_segments, const int64_t* tables,
                    const bf16* key, int64_t key_head_stride, int64_t key_row_stride, const bf16* value,
                    int64_t value_head_stride, int64_t value_row_stride, int64_t num_kv_heads, int64_t head_dim) {
    size_t num_bytes = head_dim * sizeof(bf16);
    for (int64_t s = 0; s < num_segments; s++) {
        const Segment& segment = segments[s];
        for (int64_t i = 0; i < segment.num_rows; i++) {
            int64_t position = segment.start + i, row = segment.first_row + i;
            bf16* place = pages->base + tables[segment.table + position / pages->page_tokens] * pages->page_stride +
                          position % pages->page_tokens * pages->token_stride;
            for (int64_t head = 0; head < num_kv_heads; head++) {
                bf16* of_head = place + head * pages->head_stride;
                std::memcpy(of_head, key + head * key_head_stride + row * key_row_stride, num_bytes);
                std::memcpy(of_head + pages->plane_stride, value + head * value_head_stride + row * value_row_stride,
                            num_bytes);
            }
        }
    }
}

// Attention of every segment's rows over its own pages, which hold the K/V of all positions up to its last row.
void moontide_attend(const Attention* call, int num_threads) {
    std::vector<Task> tasks = plan_tasks(*call);
    int64_t num_tasks = static_cast<int64_t>(tasks.size());
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1)
    for (int64_t i = 0; i < num_tasks; i++) {
        // The last rows see the most keys: first, so that no thread starts a long task when the others are done.
        const Task& task = tasks[num_tasks - 1 - i];
        AmxTask amx(call->has_amx);
        RowTask(*call, call->segments[task.segment], task.kv_head, task.first, task.count).run();
    }
}

// Elements of bfloat16 that the packed form of a [O][I] weight takes.
int64_t moontide_packed_size(int64_t num_outputs, int64_t num_inputs) {
    return ceil_div(num_outputs, kTileColumns) * kTileColumns * num_inputs;
}

// Packs a contiguous weight [O][I] with even I; outputs beyond the last are zero.
void moontide_pack(const bf16* weight, int64_t num_outputs, int64_t num_inputs, Pair* packed) {
    std::vector<bf16> zeros(num_inputs, 0);
    for (int64_t first = 0; first < num_outputs; first += kTileColumns) {
        TileRows rows;
        for (int64_t i = 0; i < kTileColumns; i++)
            rows.at[i] = first + i < num_outputs ? weight + (first + i) * num_inputs : zeros.data();
        pack_columns(rows, rows, num_inputs, packed + first * num_inputs / 2);
    }
}

void moontide_linear(const Linear* call, int num_threads) {
    static thread_local std::vector<bf16> packed;
    bf16* last_rows = nullptr;
    int64_t panel_rows = kPanelRows;
    if (call->uses_amx()) {
        panel_rows = kAmxPanelRows;
        packed.resize(2 * kAmxRows * call->num_inputs);
        last_rows = packed.data();
        int64_t last = call->num_rows / (2 * kAmxRows) * 2 * kAmxRows;
        for (int64_t first = last; first < call->num_rows; first += kAmxRows) {
            const bf16* at[kAmxRows];
            int64_t count = std::min<int64_t>(kAmxRows, call->num_rows - first);
            for (int64_t i = 0; i < count; i++) at[i] = call->input + (first + i) * call->input_stride;
            pack_rows(at, count, call->num_inputs, last_rows + (first - last) * call->num_inputs);
        }
    }
    int64_t num_panels = ceil_div(call->num_outputs, kTileColumns);
    int64_t num_tasks = ceil_div(call->num_rows, panel_rows) * num_panels;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1)
    for (int64_t task = 0; task < num_tasks; task++) {
        // All panels for some rows, then the next rows: the rows stay in a cache, the panels pass through.
        int64_t first = task / num_panels * panel_rows;
        AmxTask amx(last_rows != nullptr);
        compute_panel(*call, last_rows, task % num_panels, first, std::min(first + panel_rows, call->num_rows));
    }
}

// RMS norm of contiguous rows [T][width].
void moontide_norm(const bf16* input, const bf16* weight, int64_t num_rows, int64_t width, float epsilon, bf16* out,
                   int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t row = 0; row < num_rows; row++)
        normalize(input + row * width, weight, width, epsilon, out + row * width);
}

}  // extern "C"
