// softmax(scale · q kᵀ) v and its gradients in bfloat16, for processors with dot products of bfloat16 (AVX-512 BF16).
//
// A thread works on one head of one image, whose keys and values stay in its cache, and goes through the queries in
// blocks of rows. So the map of attention weights is never written to memory. Sums are float32; the weights are rounded
// to bfloat16 before they are multiplied with the values, as in torch. qkv is read, and its gradient is written, in the
// layout of the linear layer. The backward pass computes the weights again from the logarithms of their sums, as in
// https://arxiv.org/abs/2307.08691.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using Half = uint16_t;  // bfloat16
using Pair = uint32_t;  // two bfloat16 that a dot product takes together, the first in the low half

constexpr int ROWS = 32;  // queries in a block
constexpr int LANES = 16;
constexpr int MAX_DIM = 1024;  // the largest dimension of a head

struct Shape {
    int64_t batch, tokens, heads, dim;  // dim is that of a head, a multiple of 16
};

static int up(int64_t n, int to) { return int((n + to - 1) / to * to); }

// -- products: C (rows × columns) = A B, or C += A B, with `depth` pairs in each sum ----------------------------------

struct Left { const Pair *at; int64_t row, pair; };  // A: its first pair, and the strides of its rows and pairs
struct Right { const Pair *at; int64_t pair; };      // B: its columns are adjacent

template <int N>
static inline void tile(const Left &a, const Right &b, int depth, float *c, int64_t stride, bool add) {
    constexpr int M = 4;
    __m512 sum[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum[m][n] = add ? _mm512_loadu_ps(c + m * stride + n * LANES) : _mm512_setzero_ps();
    for (int k = 0; k < depth; k++) {
        __m512bh right[N];
        for (int n = 0; n < N; n++) right[n] = (__m512bh)_mm512_loadu_si512(b.at + k * b.pair + n * LANES);
        for (int m = 0; m < M; m++) {
            const auto left = (__m512bh)_mm512_set1_epi32(a.at[m * a.row + k * a.pair]);
            for (int n = 0; n < N; n++) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], left, right[n]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) _mm512_storeu_ps(c + m * stride + n * LANES, sum[m][n]);
}

// `rows` is a multiple of 4; `columns` is a multiple of 16, and the stride of C's rows.
static void product(const Left &a, const Right &b, int rows, int columns, int depth, float *c, bool add = false) {
    for (int n = 0; n < columns; n += 4 * LANES)
        for (int m = 0; m < rows; m += 4) {
            const Left left{a.at + m * a.row, a.row, a.pair};
            const Right right{b.at + n, b.pair};
            float *at = c + int64_t(m) * columns + n;
            switch ((columns - n) / LANES) {
                case 1: tile<1>(left, right, depth, at, columns, add); break;
                case 2: tile<2>(left, right, depth, at, columns, add); break;
                case 3: tile<3>(left, right, depth, at, columns, add); break;
                default: tile<4>(left, right, depth, at, columns, add);
            }
        }
}

// -- rows of bfloat16, and the operands that are made of them ----------------------------------------------------------

struct Rows {  // the rows of one head in a tensor (batch, tokens, ..., dim)
    Half *at;
    int64_t stride, count;
    Half *row(int64_t m) const { return at + m * stride; }
    Rows from(int64_t m) const { return {row(m), stride, count - m}; }
};

// Each of these functions writes `rows` rows, an even number, and fills up with zeros behind the last row of x.

static void copy(const Rows &x, int rows, int dim, Pair *out) {  // rows × dim / 2: left, for sums over dim
    const int count = std::min<int64_t>(rows, x.count);
    for (int m = 0; m < count; m++) std::memcpy(out + m * (dim / 2), x.row(m), dim * sizeof(Half));
    std::memset(out + count * (dim / 2), 0, (rows - count) * dim * sizeof(Half));
}

static void transposed(const Rows &x, int rows, int dim, Pair *out) {  // dim / 2 × rows: right, for sums over dim
    const int count = std::min<int64_t>(rows, x.count);
    for (int k = 0; k < dim / 2; k++) {
        for (int m = 0; m < count; m++) std::memcpy(out + k * rows + m, x.row(m) + 2 * k, sizeof(Pair));
        for (int m = count; m < rows; m++) out[k * rows + m] = 0;
    }
}

static void interleaved(const Rows &x, int rows, int dim, Pair *out) {  // rows / 2 × dim: right, for sums over rows
    static const Half zeros[MAX_DIM] = {};
    for (int m = 0; m < rows; m += 2) {
        const Half *one = m < x.count ? x.row(m) : zeros, *two = m + 1 < x.count ? x.row(m + 1) : zeros;
        for (int k = 0; k < dim; k++) out[m / 2 * dim + k] = one[k] | Pair(two[k]) << 16;
    }
}

static inline void store(Half *at, __m512 x) { _mm256_storeu_si256((__m256i *)at, (__m256i)_mm512_cvtneps_pbh(x)); }

static inline __m512i wide(__m256i halves) { return _mm512_cvtepu16_epi32(halves); }

static inline __m512i paired(__m512 first, __m512 second) {
    const __m512i low = wide((__m256i)_mm512_cvtneps_pbh(first)), high = wide((__m256i)_mm512_cvtneps_pbh(second));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

static inline __m512 load(const Half *at) {
    return (__m512)_mm512_slli_epi32(wide(_mm256_loadu_si256((const __m256i *)at)), 16);
}

static float dot(const Half *x, const Half *y, int dim) {
    __m512 sum = _mm512_setzero_ps();
    for (int k = 0; k < dim; k += LANES) sum = _mm512_fmadd_ps(load(x + k), load(y + k), sum);
    return _mm512_reduce_add_ps(sum);
}

static void write(const float *x, int dim, const Rows &out, int rows) {
    for (int m = 0; m < rows && m < out.count; m++)
        for (int k = 0; k < dim; k += LANES) store(out.row(m) + k, _mm512_loadu_ps(x + m * dim + k));
}

// -- weights, computed from scores in float32 whose rows have the stride `columns` -------------------------------------

static inline __m512 exp2(__m512 x) {  // 2 to the power x, with a relative error of 2e-7
    const __m512 whole = _mm512_roundscale_ps(x, 0), t = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.5403530e-4f);  // Taylor series of 2^t, |t| <= 1/2
    for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(c));
    return _mm512_scalef_ps(y, whole);
}

static inline __mmask16 within(int n, int64_t tokens) {
    return n + LANES <= tokens ? 0xffff : n < tokens ? (1 << (tokens - n)) - 1 : 0;
}

static inline __m512 weight(const float *score, float scale, float log, __mmask16 mask) {
    const __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(score), _mm512_set1_ps(scale), _mm512_set1_ps(log));
    return _mm512_maskz_mov_ps(mask, exp2(x));
}

struct Sum { float shift, total; };  // the sum of a row's weights is total · 2^shift

// Writes the weights of a row before they are divided by their sum, and returns the sum.
static Sum weigh(const float *scores, int64_t tokens, int columns, float scale, Half *weights) {
    __m512 top = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int n = 0; n < columns; n += LANES)
        top = _mm512_mask_max_ps(top, within(n, tokens), top, _mm512_loadu_ps(scores + n));
    const float shift = _mm512_reduce_max_ps(top) * scale;
    for (int n = 0; n < columns; n += LANES) {
        const __m512 y = weight(scores + n, scale, shift, within(n, tokens));
        sum = _mm512_add_ps(sum, y);
        store(weights + n, y);
    }
    return {shift, _mm512_reduce_add_ps(sum)};
}

struct Query { float log, mean; };  // the logarithm of the sum of its weights, the mean of their gradients

struct Maps { Half *d_scores; Pair *d_scores_down, *weights_down; };  // `_down`: a pair holds two rows of a column

// Computes the weights of two queries again, and the gradients of their scores: d = weight · (g - mean) · outer.
static void differentiate(
    const float *scores, const float *g, const Query *query, int64_t tokens, int columns, float scale, float outer,
    const Maps &out) {
    for (int n = 0; n < columns; n += LANES) {
        __m512 y[2], d[2];
        for (int r = 0; r < 2; r++) {
            y[r] = weight(scores + r * columns + n, scale, query[r].log, within(n, tokens));
            d[r] = _mm512_sub_ps(_mm512_loadu_ps(g + r * columns + n), _mm512_set1_ps(query[r].mean));
            d[r] = _mm512_mul_ps(_mm512_mul_ps(y[r], d[r]), _mm512_set1_ps(outer));
            store(out.d_scores + r * columns + n, d[r]);
        }
        _mm512_storeu_si512(out.d_scores_down + n, paired(d[0], d[1]));
        _mm512_storeu_si512(out.weights_down + n, paired(y[0], y[1]));
    }
}

// -- a head, and the calls from Python ---------------------------------------------------------------------------------

class Memory {  // a thread's scratch memory, handed out in pieces that each begin with a cache line
    std::vector<float> all;
    size_t used = 0;

  public:
    explicit Memory(const Shape &s) {  // as much as `backward` takes
        const size_t n = up(s.tokens, LANES), d = s.dim;
        all.resize(7 * n * d / 2 + 7 * ROWS * n / 2 + 3 * ROWS * d + 16 * LANES);
    }
    template <typename T> T *take(size_t count) {
        auto *at = (T *)((uintptr_t(all.data() + used) + 63) / 64 * 64);
        used = (float *)at - all.data() + (count * sizeof(T) + 3) / 4;
        return at;
    }
    void clear() { used = 0; }
};

struct Head {
    Rows q, k, v;
    Head(Half *qkv, const Shape &s, int64_t number) {
        const int64_t width = s.heads * s.dim;
        Half *at = qkv + number / s.heads * s.tokens * 3 * width + number % s.heads * s.dim;
        q = {at, 3 * width, s.tokens};
        k = {at + width, 3 * width, s.tokens};
        v = {at + 2 * width, 3 * width, s.tokens};
    }
};

static Rows output(Half *out, const Shape &s, int64_t number) {
    const int64_t width = s.heads * s.dim;
    return {out + number / s.heads * s.tokens * width + number % s.heads * s.dim, width, s.tokens};
}

static void forward(const Head &head, const Rows &out, float *logs, const Shape &s, float scale, Memory &memory) {
    const int n = up(s.tokens, LANES), d = int(s.dim);
    Pair *keys = memory.take<Pair>(d / 2 * n), *values = memory.take<Pair>(n / 2 * d);
    Pair *q = memory.take<Pair>(ROWS * d / 2);
    Half *weights = memory.take<Half>(ROWS * n);
    float *scores = memory.take<float>(ROWS * n), *y = memory.take<float>(ROWS * d);
    transposed(head.k, n, d, keys);
    interleaved(head.v, n, d, values);
    for (int64_t first = 0; first < s.tokens; first += ROWS) {
        const int rows = up(std::min<int64_t>(ROWS, s.tokens - first), 4);
        copy(head.q.from(first), rows, d, q);
        product({q, d / 2, 1}, {keys, n}, rows, n, d / 2, scores);
        Sum sums[ROWS];
        for (int r = 0; r < rows; r++) sums[r] = weigh(scores + r * n, s.tokens, n, scale, weights + r * n);
        product({(Pair *)weights, n / 2, 1}, {values, d}, rows, d, n / 2, y);
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < d; k++) y[r * d + k] /= sums[r].total;
        write(y, d, out.from(first), rows);
        for (int r = 0; r < rows && first + r < s.tokens; r++)
            logs[first + r] = sums[r].shift + std::log2(sums[r].total);
    }
}

static void backward(
    const Head &head, const Rows &out, const Rows &grad, const float *logs, const Head &to, const Shape &s, float scale,
    float outer, Memory &memory) {
    const int n = up(s.tokens, LANES), d = int(s.dim);
    Pair *keys = memory.take<Pair>(d / 2 * n), *values = memory.take<Pair>(d / 2 * n);
    Pair *keys_down = memory.take<Pair>(n / 2 * d);
    Pair *q = memory.take<Pair>(ROWS * d / 2), *q_down = memory.take<Pair>(ROWS / 2 * d);
    Pair *g = memory.take<Pair>(ROWS * d / 2), *g_down = memory.take<Pair>(ROWS / 2 * d);
    float *scores = memory.take<float>(ROWS * n), *d_weights = memory.take<float>(ROWS * n);
    Half *d_scores = memory.take<Half>(ROWS * n);
    Pair *d_scores_down = memory.take<Pair>(ROWS / 2 * n), *weights_down = memory.take<Pair>(ROWS / 2 * n);
    float *dq = memory.take<float>(ROWS * d), *dk = memory.take<float>(n * d), *dv = memory.take<float>(n * d);
    transposed(head.k, n, d, keys);
    transposed(head.v, n, d, values);
    interleaved(head.k, n, d, keys_down);
    for (int64_t first = 0; first < s.tokens; first += ROWS) {
        const int rows = up(std::min<int64_t>(ROWS, s.tokens - first), 4);
        const Rows q_here = head.q.from(first), g_here = grad.from(first);
        copy(q_here, rows, d, q);
        interleaved(q_here, rows, d, q_down);
        copy(g_here, rows, d, g);
        interleaved(g_here, rows, d, g_down);
        product({q, d / 2, 1}, {keys, n}, rows, n, d / 2, scores);
        product({g, d / 2, 1}, {values, n}, rows, n, d / 2, d_weights);
        Query queries[ROWS] = {};  // queries behind the last one get no gradient, whatever their weights
        for (int r = 0; r < rows && first + r < s.tokens; r++)
            queries[r] = {logs[first + r], dot(g_here.row(r), out.row(first + r), d)};
        for (int r = 0; r < rows; r += 2) {
            const Maps maps{d_scores + r * n, d_scores_down + r / 2 * n, weights_down + r / 2 * n};
            differentiate(scores + r * n, d_weights + r * n, queries + r, s.tokens, n, scale, outer, maps);
        }
        product({(Pair *)d_scores, n / 2, 1}, {keys_down, d}, rows, d, n / 2, dq);
        product({d_scores_down, 1, n}, {q_down, d}, n, d, rows / 2, dk, first > 0);
        product({weights_down, 1, n}, {g_down, d}, n, d, rows / 2, dv, first > 0);
        write(dq, d, to.q.from(first), rows);
    }
    write(dk, d, to.k, n);
    write(dv, d, to.v, n);
}

constexpr float LOG2_E = 1.44269504f;

template <typename Work> static void each_head(const Shape &s, int threads, const Work &work) {
#pragma omp parallel num_threads(threads)
    {
        Memory memory(s);
#pragma omp for
        for (int64_t number = 0; number < s.batch * s.heads; number++) {
            memory.clear();
            work(number, memory);
        }
    }
}

// Reads qkv (batch, tokens, 3, heads, dim); writes out (batch, tokens, heads, dim) and, for `gradient`, logs (batch,
// heads, tokens).
extern "C" void attend(Half *qkv, Half *out, float *logs, const Shape *shape, float scale, int threads) {
    const Shape &s = *shape;
    each_head(s, threads, [&](int64_t number, Memory &memory) {
        forward({qkv, s, number}, output(out, s, number), logs + number * s.tokens, s, scale * LOG2_E, memory);
    });
}

// Reads `grad`, the gradient of out; writes `d_qkv`, the gradient of qkv.
extern "C" void gradient(
    Half *qkv, Half *out, Half *grad, const float *logs, Half *d_qkv, const Shape *shape, float scale, int threads) {
    const Shape &s = *shape;
    each_head(s, threads, [&](int64_t number, Memory &memory) {
        const Rows y = output(out, s, number), g = output(grad, s, number);
        const float *log = logs + number * s.tokens;
        backward({qkv, s, number}, y, g, log, {d_qkv, s, number}, s, scale * LOG2_E, scale, memory);
    });
}
