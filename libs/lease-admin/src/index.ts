export { LeaseAdminModule, type LeaseAdminOptions } from './lease-admin.module';
