// LAMB's update on a CPU: the formulas of optim/lamb.py, with as few passes over the arrays as they allow.
//
// One thread updates one tensor, so its norms are added up in one order, whatever the number of threads. The update u
// goes into scratch memory: to read it again takes less time than a second division and root per element.

#include <omp.h>

#include <cmath>
#include <cstdint>

template <typename T> struct Scalars {  // in the order of lamb.Scalars
    T lr, beta1, new1, beta2, new2, root, eps, weight_decay, norm_min, norm_max, ratio_max, adapt, keep, caution;
};

template <typename T> struct Tensor {
    T *x, *g, *m, *v, *u;
    int64_t size;
};

template <typename T> struct Tensors {
    const Tensor<T> *rows;
    const int64_t *order;  // the row that a thread takes first, second, ...: the longest tensors come first
    int64_t count;
    int threads;

    template <typename Work> void each(const Work &work) const {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
        for (int64_t i = 0; i < count; i++) work(order[i], rows[order[i]]);
    }
};

// Updates the moments of one element, computes u, and adds the squares of x and u in double precision.
template <typename T>
static inline void update(const Tensor<T> &t, T *u, int64_t i, const Scalars<T> &s, T factor, double &xx, double &uu) {
    const T g = t.g[i] * factor, x = t.x[i];
    const T m = s.beta1 * t.m[i] + s.new1 * g;
    const T v = s.beta2 * t.v[i] + s.new2 * g * g;
    t.m[i] = m;
    t.v[i] = v;
    u[i] = m / (s.root * std::sqrt(v) + s.eps) + s.weight_decay * x;
    xx += double(x) * x;
    uu += double(u[i]) * u[i];
}

template <typename T> static T trust_ratio(double xx, double uu, const Scalars<T> &s) {
    const double x_norm = s.keep * std::sqrt(xx), u_norm = std::sqrt(uu);
    if (!(x_norm > 0 && u_norm > 0 && std::isfinite(x_norm) && std::isfinite(u_norm) && s.adapt > 0)) return 1;
    const double ratio = std::fmin(std::fmin(std::fmax(x_norm, s.norm_min), s.norm_max) / u_norm, s.ratio_max);
    return ratio <= 1e30 ? ratio : 1;
}

// The first half of an update: the moments, u, and the sums of the squares of x and u. It has copies of its own of the
// addresses and the numbers, which stay in registers: a compiler cannot know that no element overwrites those of a caller.
template <typename T> static void moments(const Tensor<T> t, const Scalars<T> s, T factor, double &x2, double &u2) {
    constexpr int LANES = 16;  // separate sums: a compiler may not reorder one sum, so it could not use vectors
    double xx[LANES] = {}, uu[LANES] = {};
    T *__restrict u = t.u;
    const int64_t whole = t.size - t.size % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
#pragma GCC ivdep
        for (int lane = 0; lane < LANES; lane++) update(t, u, i + lane, s, factor, xx[lane], uu[lane]);
    for (int64_t i = whole; i < t.size; i++) update(t, u, i, s, factor, xx[0], uu[0]);
    for (int lane = 1; lane < LANES; lane++) xx[0] += xx[lane], uu[0] += uu[lane];
    x2 = xx[0], u2 = uu[0];
}

template <typename T> static T lamb(const Tensor<T> &t, const Scalars<T> &s, T factor) {
    double xx, uu;
    moments(t, s, factor, xx, uu);
    const T ratio = trust_ratio(xx, uu, s), step = s.lr * ratio;
    T *__restrict x = t.x;
    const T *__restrict u = t.u;
    if (s.keep != 1)
        for (int64_t i = 0; i < t.size; i++) x[i] *= s.keep;
    for (int64_t i = 0; i < t.size; i++) x[i] -= step * u[i];
    return ratio;
}

// The sum of the squares of a gradient, in double precision.
template <typename T> static double square_sum(const T *__restrict g, int64_t size) {
    constexpr int LANES = 32;  // see moments; more than there, because one addition waits for the one before
    double sums[LANES] = {};
    const int64_t whole = size - size % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += double(g[i + lane]) * g[i + lane];
    for (int64_t i = whole; i < size; i++) sums[0] += double(g[i]) * g[i];
    for (int lane = 1; lane < LANES; lane++) sums[0] += sums[lane];
    return sums[0];
}

// scratch: as long as the longest tensor, for each thread.
template <typename T>
static void lamb_list(
    const Tensors<T> &tensors, const Scalars<T> &s, T factor, T *scratch, int64_t longest, T *ratios) {
    tensors.each([&](int64_t k, Tensor<T> t) {
        t.u = scratch + longest * omp_get_thread_num();
        ratios[k] = lamb(t, s, factor);
    });
}

template <typename T>
static void moments_list(const Tensors<T> &tensors, const Scalars<T> &s, T factor, double *squares) {
    tensors.each([&](int64_t k, Tensor<T> t) { moments(t, s, factor, squares[2 * k], squares[2 * k + 1]); });
}

template <typename T> static void squares_list(const Tensors<T> &tensors, double *squares) {
    tensors.each([&](int64_t k, Tensor<T> t) { squares[k] = square_sum(t.g, t.size); });
}

extern "C" {
void lamb_float32(
    const Tensors<float> *t, const Scalars<float> *s, double f, float *scratch, int64_t longest, float *ratios) {
    lamb_list(*t, *s, float(f), scratch, longest, ratios);
}
void lamb_float64(
    const Tensors<double> *t, const Scalars<double> *s, double f, double *scratch, int64_t longest, double *ratios) {
    lamb_list(*t, *s, f, scratch, longest, ratios);
}
void moments_float32(const Tensors<float> *t, const Scalars<float> *s, double f, double *squares) {
    moments_list(*t, *s, float(f), squares);
}
void moments_float64(const Tensors<double> *t, const Scalars<double> *s, double f, double *squares) {
    moments_list(*t, *s, f, squares);
}
void squares_float32(const Tensors<float> *t, double *squares) { squares_list(*t, squares); }
void squares_float64(const Tensors<double> *t, double *squares) { squares_list(*t, squares); }
}
